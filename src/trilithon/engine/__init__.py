"""trilithon.engine"""
