"use strict";
// Pages without charts: only the switch of the theme, after which nothing is drawn anew.
function redraw() {}
theme();
document.documentElement.dataset.ready = "true";
