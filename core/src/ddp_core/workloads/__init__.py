"""The built-in workloads: four files, each a template for your own. They use nothing that your file cannot use."""
