"""The drivers and compilers of NVIDIA and of AMD."""
