//! Disks of a domain that are still being fetched from an object store. Only their keeper waits for what is missing: any other
//! program reads zeroes there. So libvirt's own QEMU must not get them.

use hearth_disk::arrival::Arrival;
use hearth_disk::image::arriving_images;
use hearth_libvirt::definition::{self, DefinitionError, Format};

use super::backing::image_format;
use super::text::bytes;
use crate::problem::Problem;

/// Disks of this definition that QEMU would open itself, and that have not arrived completely.
pub fn problems(xml: &str, hint: &str) -> Result<Vec<Problem>, DefinitionError> {
    let mut problems = Vec::new();
    for (disk, path, format) in definition::own_images(xml)? {
        match arriving_images(&path, image_format(format.unwrap_or(Format::Raw))) {
            Ok(arriving) => problems.extend(arriving.iter().map(|one| Problem::error(&disk, missing(one), hint))),
            Err(error) => {
                let message = format!("it is not known whether {} has arrived completely: {error}", path.display());
                problems.push(Problem::error(&disk, message, hint));
            }
        }
    }
    Ok(problems)
}

fn missing(arrival: &Arrival) -> String {
    let counts = arrival.counts();
    let (missing, all) = (bytes(counts.missing_bytes), bytes(counts.bytes));
    format!(
        "is still being fetched from {}: {missing} of {all} are missing; QEMU would read zeroes there",
        arrival.source()
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use hearth_disk::arrival::Order;
    use hearth_disk::image::{create_overlay, create_overlay_over_arriving};

    use super::*;

    #[test]
    fn disk_over_arriving_image_is_named_until_complete() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let content = vec![1; 1 << 20];
        let checksum = blake3::hash(&content).as_bytes()[..16].try_into().unwrap();
        Arrival::make(&at("saved"), 2 << 20, "s3://bucket/one/disk-root", &[(0, checksum)]).unwrap();
        create_overlay_over_arriving(&at("over"), &at("saved"), "raw").unwrap();
        create_overlay(&at("top"), &at("over"), "qcow2").unwrap();
        fs::write(at("whole"), "").unwrap();
        let problems_of = |image: &str, format: &str| {
            let xml = format!(
                "<domain><name>web</name><devices><disk type='file'><driver type='{format}'/><source file='{}'/>\
                 <target dev='vda'/></disk></devices></domain>",
                at(image).display()
            );
            problems(&xml, "wait").unwrap().iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let expected = "error: vda: is still being fetched from s3://bucket/one/disk-root: 1.0 MiB of 1.0 MiB are missing; \
                        QEMU would read zeroes there; wait";
        for (image, format) in [("saved", "raw"), ("over", "qcow2"), ("top", "qcow2")] {
            assert_eq!(problems_of(image, format), [expected], "{image}");
        }
        // What a guest has written to a raw disk names no backing image.
        for (image, format) in [("over", "raw"), ("whole", "raw"), ("whole", "qcow2"), ("none", "qcow2")] {
            assert!(problems_of(image, format).is_empty(), "{image} {format}");
        }
        let note = fs::read(at("saved.arrival")).unwrap();
        fs::write(at("saved.arrival"), &note[..20]).unwrap();
        assert!(problems_of("top", "qcow2")[0].contains("it is not known whether"));
        fs::write(at("saved.arrival"), note).unwrap();
        let arrival = Arrival::open(&at("saved")).unwrap().unwrap();
        assert!(arrival.land(Order { unit: 0 }, &content).unwrap());
        assert!(problems_of("top", "qcow2").is_empty(), "it is complete");
    }
}
