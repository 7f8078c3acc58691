"""Token merging for AUTOMATIC1111's webui, Forge, reForge and SD.Next. `script.register` starts it."""
