"""What scripts import from `ortmodule.experimental`."""
