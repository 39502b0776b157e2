"""What a container engine needs, without its SDK: where it is, what is asked of it, its words."""
