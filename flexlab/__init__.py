"""FlexLab: run AI models on whatever GPUs a homelab has, from the terminal."""

__version__ = "0.1.0"
