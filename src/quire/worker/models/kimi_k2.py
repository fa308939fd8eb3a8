"""Kimi K2: DeepSeek V3 with other numbers, under a name of its own."""

from quire.worker.models.deepseek_v3 import DeepseekV3ForCausalLM

MODEL = DeepseekV3ForCausalLM
