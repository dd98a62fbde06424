"use strict";
// Before anything is painted: the colours that were chosen on another page.
const chosenTheme = localStorage.getItem("theme");
if (chosenTheme === "dark" || chosenTheme === "light") document.documentElement.dataset.theme = chosenTheme;
addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme").addEventListener("click", () => queueMicrotask(() => localStorage.setItem("theme", document.documentElement.dataset.theme)));
});
