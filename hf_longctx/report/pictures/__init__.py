"""Pictures: canvases, lines, rasters."""
