// Runs before the page is drawn, so that a chosen theme does not flash.
(() => {
  const m = document.cookie.match(/(?:^|; )penstock_theme=(light|dark)/);
  if (m) document.documentElement.dataset.theme = m[1];
  // A second click would make a change once more: a form is sent again when the visitor comes back to it, or after
  // 20 s without an answer, which may have been stopped.
  const free = f => f.ariaBusy = null;
  addEventListener('submit', e => {
    const f = e.target;
    if (f.method !== 'post') return;
    if (f.ariaBusy) return e.preventDefault();
    f.ariaBusy = true;
    setTimeout(free, 2e4, f);
  });
  addEventListener('pageshow', () => [...document.forms].forEach(free));
})();
