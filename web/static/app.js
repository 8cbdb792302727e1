// The live part of a page, its charts, dialogs and the theme. Pages work without it.
(() => {
  'use strict';
  const $ = (s, e = document) => e.querySelector(s);
  const all = (s, e = document) => [...e.querySelectorAll(s)];
  const main = $('main'), region = $('#live'), state = $('#stream'), pause = $('#pause'), dialog = $('#dialog');
  let points = main.dataset.points ? JSON.parse(main.dataset.points) : {}, tag = main.dataset.tag;
  // Details that a visitor opened stay open.
  htmx.config.morphIgnore.push('open');

  // Relative times -------------------------------------------------------------------------------
  const two = (s, a, an, b, bn) => (s / a | 0) + ' ' + an + (s % a / b | 0 ? ' ' + (s % a / b | 0) + ' ' + bn : '');
  const span = s => s < 60 ? (s | 0) + ' s' : s < 3600 ? two(s, 60, 'min', 1, 's') :
    s < 86400 ? two(s, 3600, 'h', 60, 'min') : two(s, 86400, 'd', 3600, 'h');
  // Ages are by the clock of the leader, which is skew ms ahead: the clock of the visitor's machine may be wrong. A
  // document from the browser's cache tells nothing about it.
  let skew = 0;
  const visit = performance.getEntriesByType('navigation')[0];
  if (visit?.transferSize) skew = main.dataset.now - Date.now() + performance.now() - visit.responseStart;
  const times = () => all('time[data-rel]').forEach(t => {
    const kind = t.dataset.rel, d = (Date.now() + skew - Date.parse(t.dateTime)) / 1000 * (kind === 'in' ? -1 : 1);
    const text = (kind === 'in' ? 'in ' : '') + span(Math.max(0, d)) + (kind === 'ago' ? ' ago' : '');
    if (t.textContent !== text) t.textContent = text;
  });

  // Charts ---------------------------------------------------------------------------------------
  const charts = new Map();
  // light-dark() is resolved by an element, not by a canvas.
  const colour = name => {
    const probe = document.createElement('i');
    probe.style.color = `var(--${name})`; document.body.append(probe);
    const c = getComputedStyle(probe).color; probe.remove(); return c;
  };
  const clock = s => new Date(s * 1e3).toISOString().slice(11, 19).replace(/:00$/, '');
  const stack = c => {
    const sums = c.at.map(() => 0), rows = [];
    for (const s of c.series) rows.push(s.values.map((v, i) => v == null ? null : sums[i] += v));
    return rows;
  };
  const dataOf = c => [c.at, ...(c.stacked ? stack(c).reverse() : c.series.map(s => s.values))];
  const draw = () => {
    for (const [box, u] of charts) if (!box.isConnected) { u.destroy(); charts.delete(box); }
    for (const box of all('[data-chart]')) {
      const c = points[box.dataset.chart];
      if (!c || !c.at) continue;
      const old = charts.get(box);
      if (old) { old.setData(dataOf(c)); continue; }
      box.replaceChildren();
      const order = c.stacked ? [...c.series].reverse() : c.series;
      const axis = { stroke: colour('ink-3'), font: '11px system-ui,sans-serif', grid: { stroke: colour('line'), width: 1 }, ticks: { show: false } };
      const u = new uPlot({
        tzDate: s => uPlot.tzDate(new Date(s * 1e3), 'UTC'), width: box.clientWidth, height: +box.dataset.height || 190, padding: [10, 24, 0, 0],
        cursor: { y: false, points: { size: 6 } }, legend: { live: true },
        scales: { y: { range }, right: { range } },
        axes: [{ ...axis, size: 28, values: (_, v) => v.map(clock) }, { ...axis, size: 56, values: short },
          ...(order.some(s => s.right) ? [{ ...axis, scale: 'right', side: 1, size: 48, values: short, grid: { show: false } }] : [])],
        series: [{ value: (_, v) => v == null ? '–' : clock(v) }, ...order.map(s => ({
          label: s.label, stroke: colour(s.colour), width: s.bold ? 2.5 : 1.5, dash: s.dashed ? [5, 4] : undefined, points: { show: false }, spanGaps: false,
          scale: s.right ? 'right' : 'y', paths: s.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
          fill: c.stacked ? colour(s.colour) : undefined, alpha: c.stacked ? .8 : 1,
          value: (self, v, i, k) => {
            if (k == null) return '–';
            const raw = s.values.length === self.data[0].length ? (points[box.dataset.chart].series.find(x => x.label === s.label) || s).values[k] : v;
            return raw == null ? '–' : raw.toLocaleString('en', { maximumFractionDigits: 2 }) + (s.unit || c.unit ? ' ' + (s.unit || c.unit) : '');
          },
        }))],
      }, dataOf(c), box);
      charts.set(box, u);
    }
  };
  const range = (_, lo, hi) => [Math.min(0, lo || 0), (hi || 1) * 1.08];
  const short = (_, v) => v.map(n => n.toLocaleString('en', { maximumSignificantDigits: 4, notation: 'compact' }));
  const redraw = () => { for (const [box, u] of charts) { u.destroy(); charts.delete(box); } draw(); };
  new ResizeObserver(() => { for (const [box, u] of charts) if (u.width !== box.clientWidth) u.setSize({ width: box.clientWidth, height: u.height }); }).observe(main);

  // The live part --------------------------------------------------------------------------------
  // The leader sends something every 15 s, and a poll is answered within seconds.
  const silence = 4e4, answer = 2e4;
  let source, timer, paused = false, failures = 0, heard = 0, polls = new AbortController();
  const say = (name, text) => { const t = state.firstElementChild; if (t.textContent !== text) { t.textContent = text; state.dataset.state = name; } };
  const lost = () => say('lost', 'connection lost');
  const address = extra => { const u = new URL(location); u.hash = ''; u.searchParams.delete('done'); for (const k in extra) u.searchParams.set(k, extra[k]); return u; };
  const show = async (text, id) => {
    tag = id;
    await htmx.swap({ text, target: region, swap: 'innerMorph', sourceElement: region });
    times(); draw();
  };
  const poll = async ended => {
    const ask = async (live, headers) => {
      const r = await fetch(address({ live }), { headers, cache: 'no-store', signal: AbortSignal.any([ended, AbortSignal.timeout(answer)]) });
      // An error of a proxy, or of a database that does not answer, is no page.
      if (![200, 304, 401].includes(r.status)) throw r.status;
      return r;
    };
    try {
      const r = await ask('part', tag ? { 'If-None-Match': tag } : {});
      if (r.status === 401) return leave();
      if (r.status === 200) {
        const text = await r.text();
        if (region.querySelector('[data-chart]')) points = await (await ask('points')).json() || {};
        await show(text, r.headers.get('ETag'));
      }
      if (!ended.aborted) say('poll', 'live, by polling');
    } catch { if (!ended.aborted) lost(); }
  };
  // The session has ended, and a reload leads to the login. What is typed into an open dialog stays until it is sent
  // or closed: the answer to the form leads over the login back to it.
  const leave = () => {
    if (!dialog.open) return location.reload();
    stop(); say('lost', 'session ended');
    dialog.onclose = leave;
  };
  const stop = () => { source && source.close(); source = null; clearTimeout(timer); polls.abort(); polls = new AbortController(); };
  const again = () => {
    const ended = polls.signal;
    timer = setTimeout(async () => { await poll(ended); if (ended.aborted) return; if (++failures % 10 === 0) start(); else again(); }, 2000);
  };
  const hear = f => e => { heard = performance.now(); f && f(e); };
  // A leader that hangs, and a proxy that holds the stream back, close nothing.
  const watch = () => { if (source && performance.now() - heard > silence) { stop(); lost(); again(); } };
  const start = () => {
    stop();
    if (!('live' in main.dataset) || paused || document.hidden) return;
    if (!window.EventSource) return again();
    if (['off', 'poll'].includes(state.dataset.state)) say('opening', 'connecting');
    source = new EventSource(address({ live: 'stream', seen: tag || '' }));
    heard = performance.now();
    source.addEventListener('open', hear(() => { failures = 0; say('live', 'live'); }));
    source.addEventListener('points', hear(e => { points = JSON.parse(e.data) || {}; draw(); }));
    source.addEventListener('part', hear(e => show(e.data, e.lastEventId)));
    source.addEventListener('alive', hear());
    source.addEventListener('clock', hear(e => { skew = e.data - Date.now(); times(); }));
    source.addEventListener('bye', leave);
    source.onerror = () => {
      lost();
      if (source.readyState === EventSource.CLOSED) { source = null; again(); }
    };
  };
  if (pause && 'live' in main.dataset) {
    pause.hidden = false;
    pause.onclick = () => {
      paused = !paused;
      pause.setAttribute('aria-pressed', paused); pause.textContent = paused ? 'Resume' : 'Pause';
      document.documentElement.toggleAttribute('data-paused', paused);
      if (paused) { stop(); say('paused', 'paused'); } else start();
    };
  }
  document.addEventListener('visibilitychange', () => document.hidden ? stop() : start());
  addEventListener('pagehide', stop);
  // A swap by a filter changes the address: the stream follows it.
  document.addEventListener('htmx:after:swap', e => { if (e.target !== region && source) { tag = ''; start(); } times(); draw(); });

  // Dialogs --------------------------------------------------------------------------------------
  document.addEventListener('click', async e => {
    const a = e.target.closest('a[data-dialog]');
    if (e.target.closest('[data-close]') && dialog.open) { e.preventDefault(); return dialog.close(); }
    if (!a || e.ctrlKey || e.metaKey || e.shiftKey || e.button) return;
    e.preventDefault();
    try {
      const r = await fetch(a.href, { headers: { 'X-Dialog': '1' } });
      if (r.redirected) { location = a.href; return; }
      dialog.innerHTML = await r.text();
      dialog.showModal();
    } catch { location = a.href; }
  });
  dialog.addEventListener('click', e => { if (e.target === dialog) dialog.close(); });

  // Theme ----------------------------------------------------------------------------------------
  all('[data-theme-choice]').forEach(b => b.addEventListener('click', e => {
    e.preventDefault();
    const t = b.dataset.themeChoice, root = document.documentElement;
    if (t) root.dataset.theme = t; else delete root.dataset.theme;
    document.cookie = 'penstock_theme=' + t + ';path=' + new URL(b.form.action).pathname.replace(/theme$/, '') + ';max-age=' + (t ? 31536000 : 0) + ';samesite=strict';
    all('[data-theme-choice]').forEach(o => o.toggleAttribute('aria-pressed', false) || o.setAttribute('aria-pressed', o === b));
    redraw();
  }));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);

  // Keys: / goes to the filter, p pauses.
  document.addEventListener('keydown', e => {
    if (e.ctrlKey || e.metaKey || e.altKey || /INPUT|SELECT|TEXTAREA/.test(e.target.tagName) || dialog.open) return;
    if (e.key === '/') { const f = $('.filters input'); if (f) { e.preventDefault(); f.focus(); } }
    if (e.key === 'p' && pause && !pause.hidden) pause.click();
  });
  all('form.themes input[name=next]').forEach(i => i.value = location.pathname.slice(new URL(i.form.action).pathname.replace(/theme$/, '').length) + location.search);
  setInterval(() => { if (!paused) times(); watch(); }, 1000);
  times(); draw(); start();
})();
