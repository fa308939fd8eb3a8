"""How the embedded model is made: tasks that generate text, a tokenizer, a trainer and an evaluation."""
