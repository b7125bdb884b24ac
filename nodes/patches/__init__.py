"""What the nodes put into a model of ComfyUI."""
