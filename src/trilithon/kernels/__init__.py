"""trilithon.kernels"""
