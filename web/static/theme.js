// Runs before the page is drawn, so that a chosen theme does not flash.
(() => {
  const m = document.cookie.match(/(?:^|; )penstock_theme=(light|dark)/);
  if (m) document.documentElement.dataset.theme = m[1];
  // A second click would make a change once more: a form is sent again when the visitor comes back to it, or after a
  // minute without an answer.
  const free = f => f.ariaBusy = null;
  addEventListener('submit', e => {
    const f = e.target;
    if (f.method !== 'post') return;
    if (f.ariaBusy) return e.preventDefault();
    f.ariaBusy = true;
    setTimeout(free, 6e4, f);
  });
  addEventListener('pageshow', () => [...document.forms].forEach(free));
})();
