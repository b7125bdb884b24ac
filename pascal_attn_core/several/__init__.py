"""One attention call on several devices of one process: how it is split, copied and divided among them. This package
does not know which route computes the parts; :mod:`pascal_attn_core.routes.several` combines the two."""
