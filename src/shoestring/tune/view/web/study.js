"use strict";
// The charts are drawn already; only the switch of the theme needs a script.

function redraw() {}
theme();
