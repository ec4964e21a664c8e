"""trilithon.zero"""
