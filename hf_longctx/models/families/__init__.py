"""Families of models with attention classes of ours, one file each."""

from hf_longctx.models.families import bloom, llama, mistral, mixtral, mpt
from hf_longctx.models.families.family import Family

FAMILIES: tuple[Family, ...] = (bloom.FAMILY, llama.FAMILY, mistral.FAMILY, mixtral.FAMILY, mpt.FAMILY)
