"""What could run here (candidates), how it is launched (render), what it needs (fit). All pure."""
