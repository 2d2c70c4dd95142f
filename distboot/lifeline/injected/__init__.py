"""What the wrapper puts before PYTHONPATH. Nothing here is imported by distboot itself."""
