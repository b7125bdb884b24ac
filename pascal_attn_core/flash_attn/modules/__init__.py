"""The parts of flash-attn besides attention that programs import: plain PyTorch with gradients, on any device.

Names, argument orders, shapes and ``state_dict`` keys are those of flash-attn 2.8. The modules here are loaded when a
program imports their counterpart, see :func:`pascal_attn_core.flash_attn.patch_flash_attn`.
"""
