package picture

import "html/template"

// Table has the numbers of a picture as texts.
type Table struct {
	Caption string
	Head    []string
	Rows    [][]string // each as long as Head
}

// Data renders the table of a picture, folded until it is asked for.
func Data(t Table) template.HTML {
	var c canvas
	c.open("details", "class", "pic-data")
	c.leaf("summary", "Data")
	c.open("div", "class", "pic-scroll", "tabindex", "0")
	c.open("table")
	c.leaf("caption", t.Caption)
	c.open("thead")
	c.open("tr")
	for _, head := range t.Head {
		c.leaf("th", head, "scope", "col")
	}
	c.close("tr", "thead")
	c.open("tbody")
	for _, row := range t.Rows {
		c.open("tr")
		for i, text := range row {
			if i == 0 {
				c.leaf("th", text, "scope", "row")
				continue
			}
			c.leaf("td", text)
		}
		c.close("tr")
	}
	c.close("tbody", "table", "div", "details")
	return c.html()
}
