"""Models in plain PyTorch that know nothing of parallelism."""

from colrow.models.gpt import GPT as GPT
from colrow.models.gpt import GPTConfig as GPTConfig
