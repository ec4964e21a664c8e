"""trilithon.optim"""
