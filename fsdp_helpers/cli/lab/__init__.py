"""JupyterLab for this series: its settings, copies to work in, and runs whose outputs are saved."""
