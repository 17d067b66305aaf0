"""What it runs on: the device, the CPUs granted, the software, the folders."""
