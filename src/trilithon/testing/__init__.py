"""trilithon.testing"""
