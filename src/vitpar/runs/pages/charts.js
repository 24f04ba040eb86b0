// Draws the charts of a page with Plotly. All texts that it shows by itself are those of vitpar, or are escaped.
const unpacked = async id => {
  const text = atob(document.getElementById(id).textContent), bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).text();
};
// Plotly reads a part of HTML in texts.
const escaped = text => text.replaceAll('&', '&amp;').replaceAll('<', '&lt;');
const chosen = name => document.querySelector(`input[name=${name}]:checked`)?.id.slice(name.length + 1) ?? '';
const shows = id => document.getElementById(id)?.checked ?? true;
const systemDark = matchMedia('(prefers-color-scheme: dark)');
const AXES = {step: 'step', samples: 'samples', hours: 'hours of training'};
const TITLES = {step: 'step %{x:,d}', samples: '%{x:,d} samples', hours: '%{x:.4~f} hours'};
const SYMBOLS = {checkpoint: 'triangle-up', restart: 'triangle-down'};
let data, zoom = null, reset = 0, turn = 0;

// The layout that all charts share.
function frame(dark, narrow) {
  const color = dark ? '#fff' : '#000', page = dark ? '#121416' : '#fff', grid = dark ? '#fff2' : '#0002';
  return {
    // Without a pointer the buttons are always shown: they stand above the lines.
    margin: {l: 62, r: 14, t: matchMedia('(hover: none)').matches ? 28 : 8, b: 42}, paper_bgcolor: page, plot_bgcolor: page, showlegend: false,
    font: {family: 'system-ui, sans-serif', size: 12, color}, uirevision: 'kept',
    hoverlabel: {bgcolor: page, bordercolor: '#8886', font: {color, size: 12}},
    modebar: {bgcolor: 'transparent', color: '#888', activecolor: color},
    // A finger scrolls the page; a mouse zooms.
    dragmode: matchMedia('(pointer: coarse)').matches ? false : 'zoom',
    xaxis: {zeroline: false, ticks: 'outside', tickcolor: '#888', spikecolor: '#888', spikethickness: 1, nticks: narrow ? 4 : 7,
      tickangle: 0, gridcolor: grid},
    yaxis: {zeroline: false, gridcolor: grid, nticks: 7, separatethousands: true},
  };
}

// Returns traces and layout that Python has made, with the colours of the theme and inert texts.
function ready(chart, dark, narrow) {
  const themed = (value, key) => {
    if (Array.isArray(value)) return value.map(one => themed(one, key));
    if (value && typeof value === 'object')
      return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, themed(one, name)]));
    if (typeof value !== 'string' || key === 'hovertemplate') return value;
    return /^#\w+\|#\w+$/.test(value) ? value.split('|')[dark ? 1 : 0] : escaped(value);
  };
  const visible = name => shows(`${chart.place}/${name}`);
  const list = chart.traces.map(trace => themed({...trace, visible: visible(trace.name),
    error_y: trace.error_y && {...trace.error_y, visible: visible('bands')}}));
  const base = frame(dark, narrow), {xaxis, yaxis, ...more} = themed(chart.layout);
  const small = axis => axis.title ? {...axis, title: {...axis.title, standoff: 6, font: {size: 11}}} : axis;
  return [list, {...base, hovermode: 'closest', ...more, dragmode: chart.fixed ? false : base.dragmode,
    xaxis: {...base.xaxis, ...small(xaxis)}, yaxis: {...base.yaxis, ...small(yaxis)}}];
}

function traces(chart, axis, colour) {
  const list = [], smoothing = chosen('smooth'), most = Math.max(...chart.lines.map(line => line.wider), 1);
  const value = (name, unit) => `%{${name}:${chart.digits}}${unit}`;
  const lines = chart.lines.map((line, at) => ({...line, legendrank: at + 1}));
  for (const line of lines.sort((one, two) => two.wider - one.wider)) {
    const {y, x: {[axis]: x}, smooth: {[smoothing]: smooth}, evaluated, legendrank} = line, color = colour(line);
    const visible = shows(`${chart.place}/${line.name}`) && shows(`run-${line.run}`) && shows(evaluated ? 'kind-validation' : 'kind-training');
    const base = {x, name: escaped(line.name), visible, legendrank, hoverlabel: {namelength: -1}};
    const alone = y.map((value, at) => value !== null && (y[at - 1] ?? null) === null && (y[at + 1] ?? null) === null);
    const wider = line.wider * Math.min(2.5, 8 / most), width = 1.7 + wider;
    if (smooth) {
      list.unshift({...base, y, mode: 'lines', opacity: .35, line: {color, width: 1}, hoverinfo: 'skip'});
      list.push({...base, y: smooth, mode: 'lines', line: {color, width}, customdata: y,
        hovertemplate: `${value('customdata', chart.unit)} (smoothed ${value('y', chart.unit)})`});
    } else {
      // Evaluations are rare: the closest one is shown, and named.
      list.push({...base, y, mode: evaluated || alone.includes(true) ? 'lines+markers' : 'lines',
        marker: {color, opacity: 1, size: evaluated ? 5 + wider : alone.map(one => one ? 5 : 0)},
        line: evaluated ? {color, width: 1.7, dash: '5px,3px'} : {color, width},
        text: line.x.step.map(step => step?.toLocaleString('en')),
        hovertemplate: value('y', chart.unit) + (evaluated ? ' at step %{text}' : '')});
    }
  }
  // Bands of runs that differ in their seed alone, behind their lines.
  for (const group of shows('bands') ? data.seeds ?? [] : []) for (const kind of [false, true]) {
    const alike = lines.filter(line => group.includes(line.run) && line.evaluated === kind && shows(`run-${line.run}`));
    const steps = alike.map(line => line.x.step.join());
    if (alike.length < 2 || steps.some(one => one !== steps[0]) || !shows(kind ? 'kind-validation' : 'kind-training')) continue;
    const rows = alike[0].y.map((_, at) => alike.map(line => (line.smooth[smoothing] ?? line.y)[at]));
    const edge = sign => rows.map(row => {
      if (row.includes(null)) return null;
      const mean = row.reduce((one, two) => one + two) / row.length;
      return mean + sign * Math.sqrt(row.reduce((sum, y) => sum + (y - mean) ** 2, 0) / (row.length - 1));
    });
    const base = {x: alike[0].x[axis], mode: 'lines', name: '', hoverinfo: 'skip', line: {width: 0, color: colour(alike[0])}};
    list.unshift({...base, y: edge(-1)}, {...base, y: edge(1), fill: 'tonexty', fillcolor: colour(alike[0]) + '33'});
  }
  for (const kind in shows('marks') ? SYMBOLS : {}) {
    const marks = data.marks.filter(mark => mark.kind === kind && shows(`run-${mark.run}`));
    if (marks.length) list.push({x: marks.map(mark => mark.x[axis]), legendrank: 9999, yaxis: 'y2', mode: 'markers', name: '',
      y: marks.map(mark => kind === 'restart' ? .97 : .025 + .03 * mark.run), hoverlabel: {namelength: 0},
      text: marks.map(mark => escaped(mark.words)), hovertemplate: '%{text}',
      marker: {symbol: SYMBOLS[kind], size: 6, opacity: .8, color: marks.map(colour)}});
  }
  return list;
}

function range(axis) {
  const all = data.charts.flatMap(chart => (chart.lines ?? []).flatMap(line => line.x[axis])).filter(x => x !== null);
  const high = all.reduce((one, two) => Math.max(one, two), -Infinity);
  let low = all.reduce((one, two) => Math.min(one, two), Infinity);
  if (!all.length) return null;
  if (low <= high / 2) low = Math.min(low, 0);  // a run that was resumed in another folder starts late
  const space = .015 * (high - low) || 1;
  return [low - space, high + space];
}

function layout(chart, axis, full, dark, colour, narrow) {
  const base = frame(dark, narrow), scale = chosen('scale');
  const log = chart.positive && (scale === 'log' || scale === 'usual' && chart.log);
  const at = zoom ?? full ?? [0, 1], whole = axis !== 'hours' && at[1] - at[0] < 8 ? 1 : undefined;
  const sizes = chart.lines.flatMap(line => line.y).filter(y => y !== null).map(Math.abs);
  const most = sizes.reduce((one, two) => Math.max(one, two), 0);
  const decades = Math.log10(most / sizes.reduce((one, two) => Math.min(one, two), most));
  const restarts = data.marks.filter(mark => mark.kind === 'restart' && shows('marks') && shows(`run-${mark.run}`));
  const missing = !chart.lines.some(line => line.x[axis].some(x => x !== null));
  return {
    ...base, hovermode: 'x unified',
    xaxis: {...base.xaxis, range: at, uirevision: ++turn, dtick: whole, title: {text: AXES[axis], standoff: 6, font: {size: 11}},
      showgrid: false, exponentformat: 'SI', unifiedhovertitle: {text: TITLES[axis]}},
    yaxis: {...base.yaxis, type: log ? 'log' : 'linear', uirevision: `${scale} ${reset}`, rangemode: chart.zero ? 'tozero' : 'normal',
      autorangeoptions: {include: chart.least && !log ? [chart.least] : undefined, clipmax: chart.most ? 1.02 * chart.most : undefined},
      ticksuffix: chart.unit, hoverformat: chart.digits,
      exponentformat: most >= 1000 ? 'SI' : 'power', minexponent: most >= 1000 ? 3 : 4,
      // Ticks at 1, 2 and 5, or of many decades at 1: more would overlap.
      dtick: !log || decades && decades < .4 ? undefined : decades < 3 ? 'D2' : 1,
      tickformat: chart.whole ? ',d' : log ? most >= 1000 ? '.3~s' : '.3~g' : undefined},
    yaxis2: {overlaying: 'y', range: [0, 1], visible: false, fixedrange: true},
    shapes: restarts.map(mark => ({x0: mark.x[axis], x1: mark.x[axis], y0: 0, y1: 1, yref: 'paper', type: 'line',
      line: {color: colour(mark), width: 1, dash: 'dot'}})),
    annotations: missing ? [{text: 'not recorded', x: .5, y: .5, xref: 'paper', yref: 'paper', showarrow: false}] : [],
  };
}

function bind(plot) {
  plot.on('plotly_relayout', change => {
    const low = change['xaxis.range[0]'] ?? change['xaxis.range']?.[0];
    const high = change['xaxis.range[1]'] ?? change['xaxis.range']?.[1];
    if (low === undefined) return;
    zoom = [low, high];
    draw();
  });
  plot.on('plotly_doubleclick', unzoom);
}

function unzoom() { zoom = null; reset += 1; draw(); }

// How far a chart is outside of the view.
function away(plot) {
  const {top, bottom} = plot.getBoundingClientRect();
  return Math.max(0, top - innerHeight, -bottom);
}

let drawing = 0;
async function draw() {
  const mine = ++drawing, axis = chosen('x') || 'step', full = range(axis);
  const dark = chosen('theme') === 'dark' || chosen('theme') !== 'light' && systemDark.matches;
  const colour = one => (one.colour ?? data.colours[one.run])[dark ? 1 : 0];
  const back = {name: 'reset', title: 'Show everything', icon: Plotly.Icons.home, click: unzoom};
  const places = data.charts.map(chart => ({chart, plot: document.getElementById(chart.place)}))
    .filter(({plot}) => !plot.closest('details:not([open])'));  // drawn when they are opened
  // Those in view come first.
  for (const {chart, plot} of places.sort((one, two) => away(one.plot) - away(two.plot))) {
    const config = {displaylogo: false, responsive: true, doubleClick: chart.lines ? false : 'reset',
      displayModeBar: chart.fixed ? false : 'hover', modeBarButtons: [['zoom2d', 'pan2d', chart.lines ? back : 'resetScale2d', 'toImage']]};
    const narrow = plot.clientWidth < 500;
    const drawn = chart.lines ? [traces(chart, axis, colour), layout(chart, axis, full, dark, colour, narrow)] : ready(chart, dark, narrow);
    const first = !plot.on;
    await Plotly.react(plot, ...drawn, config);
    if (chart.lines && first) bind(plot);
    await new Promise(resolve => setTimeout(resolve));  // show it, and answer to buttons
    if (mine !== drawing) return;
  }
  document.documentElement.dataset.drawn = Math.round(performance.now());
}

// Replaces the content of the page by that of a newer one. Charts, switches and open tables stay as they are.
async function update() {
  const answer = await fetch('version' + location.search), root = document.documentElement;
  if (!answer.ok || await answer.text() === root.dataset.version) return;
  const page = new DOMParser().parseFromString(await (await fetch('/' + location.search)).text(), 'text/html');
  if (!page.getElementById('data')) return;
  const old = document.querySelector('main'), fresh = document.importNode(page.querySelector('main'), true);
  const key = one => (one.closest('figure')?.querySelector('.plot').id ?? '') + one.querySelector('summary').textContent;
  const open = new Map([...old.querySelectorAll('details')].map(one => [key(one), one.open]));
  for (const one of fresh.querySelectorAll('details')) one.open = open.get(key(one)) ?? one.open;
  for (const input of fresh.querySelectorAll('input')) input.checked = document.getElementById(input.id)?.checked ?? input.checked;
  for (const plot of fresh.querySelectorAll('.plot')) {
    const kept = document.getElementById(plot.id);
    kept?.setAttribute('aria-label', plot.getAttribute('aria-label'));
    if (kept) plot.replaceWith(kept);
  }
  const focused = document.activeElement?.id, top = scrollY;
  old.replaceWith(fresh);
  scrollTo(0, top);
  sortable();
  if (focused) document.getElementById(focused)?.focus({preventScroll: true});
  root.dataset.version = page.documentElement.dataset.version;
  data = JSON.parse(await unpacked('data'));
  await draw();
}

// Makes the headings of a board's table buttons that sort its rows.
let order = null;
function sortable() {
  const list = document.querySelector('.runs table'), heads = [...list?.rows[0].cells ?? []].filter(head => head.textContent);
  const by = cell => Number(cell.querySelector('[data-by]')?.dataset.by ?? NaN);
  const sort = () => {
    const {column, down} = order, sign = down ? -1 : 1;
    const compared = (one, two) => Number.isNaN(one) ? 1 : Number.isNaN(two) ? -1 : sign * (one - two);
    const rows = [...list.rows].slice(1).map(row => [row, by(row.cells[column]), row.cells[column].textContent]);
    const numbers = rows.some(([, number]) => !Number.isNaN(number));
    rows.sort((one, two) => numbers ? compared(one[1], two[1]) : sign * one[2].localeCompare(two[2]));
    for (const [row] of rows) row.parentNode.append(row);
    for (const head of heads) head.ariaSort = head.cellIndex === column ? (down ? 'descending' : 'ascending') : null;
  };
  for (const head of heads) {
    const button = document.createElement('button');
    [button.type, button.textContent] = ['button', head.textContent];
    button.addEventListener('click', () => {
      order = {column: head.cellIndex, down: order?.column === head.cellIndex && !order.down};
      sort();
    });
    head.replaceChildren(button);
  }
  if (order && list) sort();
}

(async () => {
  sortable();
  data = JSON.parse(await unpacked('data'));
  if (!data.charts.length && !document.documentElement.dataset.version) return;
  const script = document.createElement('script');
  script.textContent = await unpacked('library');
  document.head.append(script);
  document.addEventListener('change', event => { if (event.target.name === 'x') zoom = null; draw(); });
  document.addEventListener('toggle', event => { if (event.target.querySelector('.plot')) draw(); }, true);
  systemDark.addEventListener('change', draw);
  await draw();
  if (!document.documentElement.dataset.version) return;
  for (;;) {
    await new Promise(resolve => setTimeout(resolve, 3000));
    try { await update(); } catch {}
  }
})();
