// Runs before the page is drawn, so that a chosen theme does not flash.
(() => {
  const m = document.cookie.match(/(?:^|; )penstock_theme=(light|dark)/);
  if (m) document.documentElement.dataset.theme = m[1];
})();
