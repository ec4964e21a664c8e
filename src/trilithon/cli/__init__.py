"""trilithon.cli"""
