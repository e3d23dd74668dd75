"""The built-in workloads: four files, each a template for one's own. They use nothing that another file cannot use."""
