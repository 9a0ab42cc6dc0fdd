"""What the tests stand on: nodes, Redis, a fault-making proxy, certificates, and both clients
behind one face."""
