"""`orca-hf bench`: what is measured of Orca, against native generate() and others. One file for each subcommand."""
