"""Commands from outside: a run is started, asked, scaled, evaluated."""
