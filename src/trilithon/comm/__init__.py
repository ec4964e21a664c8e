"""trilithon.comm"""
