// Package picture draws the pictures of the dashboard: pure functions from typed values to SVG.
//
// # Rules
//
// A picture has a title and a description, and Table returns its numbers for readers who do not see it (Data renders
// that table). Texts are escaped, shortened and stripped of characters that do not print, so that every picture is safe
// markup whatever a queue or a node is called.
//
// The content security policy of the dashboard forbids inline styles: a picture has classes only, all of which begin
// with pic-, and static/picture.css gives them colours from the custom properties of
// static/app.css, for light and dark. No state is told by
// colour alone: it has a text, a glyph or a pattern as well.
//
// # Geometry
//
// Except for the state flow, horizontal coordinates are percentages of the width and vertical ones
// are pixels: a picture
// fills any width, and its texts and strokes keep their size. Curves lie in a nested svg of 100 by 100 units that is
// stretched without its strokes. The state flow, a diagram, exists in a wide and a narrow layout, and a container query
// shows one of them.
package picture
