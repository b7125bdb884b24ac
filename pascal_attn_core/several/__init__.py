"""One attention call on several devices of one process: how it is cut, copied and shared out. Which route computes the
parts is not known here; :mod:`pascal_attn_core.routes.several` puts both together."""
