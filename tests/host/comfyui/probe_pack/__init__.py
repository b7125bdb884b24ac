"""A node pack for tests only: conditioning of any width, counting, capturing, other packs' patches, accidents."""

from . import _status
from .io_nodes import ProbeCapture, ProbeCond, ProbeFlash, ProbeFresh, ProbeSound
from .model_nodes import ProbeCount, ProbeOtherPatch, ProbeTrip

_status.record_progress_texts()

NODE_CLASS_MAPPINGS = {
    cls.__name__: cls
    for cls in (ProbeCapture, ProbeCond, ProbeCount, ProbeFlash, ProbeFresh, ProbeOtherPatch, ProbeSound, ProbeTrip)
}
