"use strict";
// The colours that were chosen are kept in a cookie, so that the hub sends the next page in them, even to another person.
document.getElementById("theme").addEventListener("click", () => queueMicrotask(() => {
  document.cookie = `theme=${document.documentElement.dataset.theme}; path=/; max-age=31536000; samesite=lax`;
}));
