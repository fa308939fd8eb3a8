"""An executor without a model: it checks what it is told, and says what a real one would have drawn."""
