"""JupyterLab for this series: settings, copies to work in, and runs whose outputs are saved."""
