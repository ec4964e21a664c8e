"""trilithon.pretrain"""
