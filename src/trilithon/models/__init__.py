"""trilithon.models"""
