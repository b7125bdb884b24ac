"""ComfyUI's answers for the tests of this folder: ``stub_host`` and ``StubHost`` in ``attn_support.comfy.stub``."""

from attn_support.comfy.stub import stub_host

__all__ = ["stub_host"]
