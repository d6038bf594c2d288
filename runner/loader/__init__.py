"""Weights from disk: GGUF files and Hugging Face directories into a `Decoder`, or an error that names what is wrong."""

from runner.loader.cache import default_cache_dir
from runner.loader.load import DTYPES, LoadedModel, load_model
from runner.model.errors import ModelError

__all__ = ["DTYPES", "LoadedModel", "ModelError", "default_cache_dir", "load_model"]
