"""Token merging for AUTOMATIC1111's webui, Forge and reForge. `script.register` is where it begins."""
