"""The changes that the nodes make to a model of ComfyUI."""
