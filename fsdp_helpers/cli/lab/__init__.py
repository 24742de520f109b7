"""JupyterLab for this series: its settings, working copies, and tools that run, print or project the notebooks."""
