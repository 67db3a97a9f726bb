//! Identity: what a domain keeps when it is renamed.

use roxmltree::Document;

use crate::definition::{DefinitionError, Domain, text_of};

/// The domain's UUID. libvirt gives one to each domain that it defines.
pub fn uuid(xml: &str) -> Result<Option<String>, DefinitionError> {
    let document = Document::parse(xml)?;
    let domain = Domain::of(&document)?;
    Ok(text_of(domain.root, "uuid").map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::DOMAIN;

    #[test]
    fn uuid_is_found() {
        assert_eq!(uuid(DOMAIN).unwrap().as_deref(), Some("7ff91744-3560-45d6-a0c5-e279a76bb8e0"));
        assert_eq!(uuid("<domain><name>web</name><devices/></domain>").unwrap(), None);
    }
}
