"""ComfyUI loads this folder as a package and finds the nodes here. Everywhere else (pytest imports it as a module
without a package) it does nothing; ``pascal_attn_core`` is the library."""

if __package__:
    from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    WEB_DIRECTORY = "./nodes/web"

    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
