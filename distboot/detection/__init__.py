"""From an environment to a `Placement`, and from that to what frameworks read. Pure."""
