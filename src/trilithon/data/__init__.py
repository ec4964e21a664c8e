"""trilithon.data"""
