"""trilithon.config"""
